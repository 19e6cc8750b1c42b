"""One way to print: a table for the terminal and for Markdown."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from rich.table import Table as RichTable


@dataclass
class Table:
    """Columns, of which the first is text and the others are numbers; `rows` hold what is to be shown."""

    title: str
    columns: Sequence[str]
    rows: list[Sequence[str]] = field(default_factory=list)

    def markdown(self) -> str:
        lines = [self.columns, ["---", *["---:"] * (len(self.columns) - 1)], *self.rows]
        return f"{self.title}\n\n" + "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"

    def rich(self) -> RichTable:
        result = RichTable(title=self.title)
        for i, column in enumerate(self.columns):
            result.add_column(column, justify="right" if i else "left")
        for row in self.rows:
            result.add_row(*row)
        return result
