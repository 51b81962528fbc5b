"""The paper's experiments, all of them: what is run, how, what came of it, and what that says about its claims."""
