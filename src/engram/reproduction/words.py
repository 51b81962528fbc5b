"""The sentences of docs/reproduction.md that hold no numbers of ours."""

INTRODUCTION = """
Every table here is written from [results/](../results) by `python tools/write_results.py`, and a test does it again
and compares. `engram reproduce` makes such a folder, `engram report results` one page of it with all figures. Trials
are paired: in each, all methods begin with the same weights and see the same tasks and samples in the same order.
[departures.md](departures.md) has the choices that the paper leaves open.
"""

ABOUT_VERDICTS = """
*Reproduced*: our 95% interval (Student's, of the paired differences) lies on the side of zero that the paper reports.
*Contradicted*: it lies on the other side. *Not reproduced*: it contains zero. *Not tested*: fewer than three pairs
were learned to the end. p is how often chance alone would show as large a difference; sixteen tests at once make one
p below 0.05 likely without any effect, so single verdicts near that bound are weak, and those with p below 0.003 hold
after Bonferroni's correction.
"""

ABOUT_STRENGTHS = """
The paper chose its λ by a grid search on a single seed, whose ends stand in comments of its source. Ours is on a seed
and on samples of their own. **What it shows:** on Permuted MNIST the paper's λ for Online EWC and MAS are too large
for importances as they are computed here (the last tasks can no longer be learned), and DHP suffers more from that
than the baselines do. Each at the best λ of its own grid, DHP is a little ahead on Permuted MNIST and a little behind
on Split MNIST, which one seed does not prove, and many a best λ lies at an edge of its grid. Too large a λ would also
explain Online EWC on the imbalanced benchmark, where the paper's is larger still; no grid was run there. Published
strengths do not transfer between implementations of the Fisher information, and the paper does not say which it used:
so the differences above are those *at the paper's strengths*.
"""

ABOUT_STUDY = """
Everything as in the table but for the change: on Split MNIST at full length, and for what may matter where classes
come back in every task on a shorter Permuted MNIST (fewer tasks, a tenth of the digits, small batches; on a CPU). A
change of the baselines alone, or of DHP alone, is compared with the other as it is without the change. With so few
trials only large effects show. **What matters:**

- *The scale of the activations.* Standardised inputs or He's initialisation raise every method to where consolidation
  has little left to do, and leave little between DHP and the baseline. Without them the hidden activations of these
  networks, and with them the trace, are small: the plastic part adds little to the weights in force, and its gradient
  little to the rate at which they learn. DHP then behaves like the *plain* baseline, and the baseline with the extra
  set of slow weights, which has twice the rate, is ahead of both.
- *The baseline.* Against the plain head, DHP with consolidation is level, on either benchmark.
- *The size at which the trace is read.* Read at a fixed size it matters: more to gain under consolidation, more to
  lose without.
- *The number of epochs.* With few, DHP loses more under consolidation; with many, less.
- *Hardly anything else*: not the range of η, nor whether η is learned or the loss differentiated through the trace,
  nor what of α and the weights in force is protected (with masks, weights that a task holds never move), nor the
  penalty's step, nor the labels of the Fisher information, nor γ near one. Whether outputs are masked in training
  shows in no interval but one.
"""

ABOUT_STEADY = """
Two things stand in the way of the paper's form: a trace whose size is that of the activations, and a trace that
starts with hardly any weight. On Permuted MNIST, where classes come back in every task, there may be a third: what
consolidation holds is θ, and the trace beside it is free to move. Among the candidates below, one that left it so
lost under Online EWC; in the study it made no difference. The steady trace changes these:

- each class writes its mean activation *less the mean over the classes of the batch*, slowly and at a fixed rate, so
  that the trace is a mean over many thousand batches and tells a class from the others;
- it is *read at a fixed root mean square*, whatever the size of the activations, with an initial α that lets it count
  at once;
- it is *not differentiated through*: the trace is data, α alone is learned;
- a penalty protects *the weight in force*, θ + α Hebb, in place of θ: where it matters, the slow weight makes up for
  what the trace would change.

`engram run BENCHMARK --methods dhp+si --steady` runs it, and `engram.preset(BENCHMARK, METHOD,
**engram.config.presets.STEADY)` is the same from Python. **Use it with consolidation.** Alone, a network with it
learns each task better and forgets the earlier ones all the faster. Cautions: it was compared with baselines at the paper's
strengths, not at the best for each. Part of what it could do is to let the output layer learn faster; a baseline with
a constant trace of the same size, which learns as fast, gains only a part of it (the tables of the control): on Split
MNIST little under SI and Online EWC and a good part under MAS. Single trials can go wrong, as the table of the worst
shows: on the imbalanced benchmark one with SI collapsed in a late task and recovered in part. On Split MNIST, in the
study above, a form in which η is learned was better still; it was not tried elsewhere. On the mixture it learns where
the paper's form diverges, and gains with SI, but *loses with MAS*, whose baseline is there the one held most tightly.
"""

HOW_IT_WAS_FOUND = """
It was chosen on validation samples (the last sixth of the training samples, on which nothing was trained) and on a
seed that no run over ten trials uses, from the candidates below, in runs shorter than the paper's; on Split MNIST
nothing was tried before the choice. Of those tried on both benchmarks, it was the only one that helped in every cell.
In the paper's full number of epochs it lost what it had alone, which the shorter runs had not shown. The mixture was
among the benchmarks of the choice with the first of its tasks only.
"""

ABOUT_DATA = """
notMNIST's published training file was not to be had: its training letters are fewer, from the same collection, and
none of them is among the test letters, which are the published ones. SVHN's digits were cropped again from the
published full-number images by their published boxes. Both show in the results as files of the published form that
are not the published ones.
"""

WHAT_WAS_LOST = """
The parts on the GPU, but for those of the mixture and the tables of Permuted and Split MNIST, shared it with each
other, so their seconds say how long they took together, not how fast one is:
[benchmarks/records](../benchmarks/records) has that. Those two tables were made by `engram run`, and put into sheets
afterwards; the candidates by a script that was not kept, from the settings that `results/selection.json` has.

On the mixture the DHP Softmax as in the paper *diverged* in every trial with consolidation, though η was bounded, and
in none without: so its three comparisons there could not be made. Nothing that is not consolidated diverged, with DHP
or without. The dynamics in the results show how it comes to that: *η is learned up to its bound at one*, where the
trace is no memory any more but the mean activations of the batch at hand. The batch then reads, in the row of each of
its labels, what those labels have just written: in training a way to a low loss that there is not in evaluation,
which also fits how much DHP alone loses there. The trace is large on this network, α grows on, and the more under
consolidation, which holds θ. What tips it over in the end was not looked into further; the penalties' own steps
cannot (they are proximal). One and the same trial of SI, Online EWC and SI with the steady trace was lost within a
few steps, so on the same samples. All this was seen on the GPU only. An earlier run of five trials, ended in its
fifth task, showed the same but for a trial of DHP alone that was lost as well, and is not counted here.

The same settings in a stack of another size may round otherwise on a GPU. Where trials differ in length, that shows:
five trials of `dhp` on the imbalanced benchmark stand both in the table and among the initial values of η, and are
not quite the same.
"""
