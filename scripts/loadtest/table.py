"""A table of text: for the terminal, and as Markdown (pure)."""

from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Table:
    """Rows of cells under a header; the first column is text, the others are figures and stand to the right."""

    title: str
    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    notes: Sequence[str] = field(default_factory=tuple)

    def text(self) -> str:
        """For a terminal."""
        lines = [self.header, *self.rows]
        widths = [max(len(line[column]) for line in lines) for column in range(len(self.header))]

        def drawn(line: Sequence[str]) -> str:
            first, *others = (
                cell.ljust(width) if column == 0 else cell.rjust(width)
                for column, (cell, width) in enumerate(zip(line, widths, strict=True))
            )
            return "  ".join([first, *others]).rstrip()

        rule = "-" * len(drawn(["-" * width for width in widths]))
        head = [self.title] if self.title else []
        return "\n".join([*head, drawn(self.header), rule, *map(drawn, self.rows), *self.notes])

    def markdown(self) -> str:
        """For a document."""

        def drawn(line: Sequence[str]) -> str:
            return "| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |"

        rule = "| " + " | ".join(["---"] + ["---:"] * (len(self.header) - 1)) + " |"
        head = [f"**{self.title}**", ""] if self.title else []
        notes = ["", *self.notes] if self.notes else []
        return "\n".join([*head, drawn(self.header), rule, *map(drawn, self.rows), *notes])
