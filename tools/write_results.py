"""Write docs/reproduction.md, the README's table and the pictures of both from results/."""

from __future__ import annotations

from pathlib import Path

from engram.reproduction.document import readme_table, write_document
from engram.reproduction.figures import draw_overview
from engram.runs.sheets import read_reproduction

ROOT = Path(__file__).parent.parent
BEGIN, END = "<!-- from results/ -->", "<!-- end -->"


def documents(root: Path = ROOT) -> dict[Path, str]:
    """What each file is to hold."""
    readme = (root / "README.md").read_text(encoding="utf-8")
    before, _, rest = readme.partition(BEGIN)
    _, _, after = rest.partition(END)
    return {
        root / "docs" / "reproduction.md": write_document(root / "results"),
        root / "README.md": f"{before}{BEGIN}\n{readme_table(root / 'results').strip()}\n{END}{after}",
    }


def main() -> None:
    for path, text in documents().items():
        path.write_text(text, encoding="utf-8")
    names = ("reproduction-differences", "reproduction-steady")
    for name, drawing in zip(names, draw_overview(read_reproduction(ROOT / "results").sheets), strict=True):
        (ROOT / "docs" / "images" / f"{name}.png").write_bytes(drawing.to_bytes("png"))


if __name__ == "__main__":
    main()
