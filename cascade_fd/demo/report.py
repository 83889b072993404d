"""What the demo prints, with rich: progress, answers, whether the tokens are equal, bytes and times."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rich import progress as bars
from rich.console import Console
from rich.table import Table

if TYPE_CHECKING:
    from cascade_fd.demo.prompt import Task
    from cascade_fd.demo.run import Result


class Progress:
    """One line per stage; stages of known length have a bar."""

    def __init__(self) -> None:
        columns = (bars.TextColumn("{task.description:<48}"), bars.BarColumn(24), bars.TimeElapsedColumn())
        self._bars = bars.Progress(*columns)
        self._task: bars.TaskID | None = None

    def __enter__(self) -> Progress:
        self._bars.start()
        return self

    def __exit__(self, *error: object) -> None:
        if error[0] is None:
            self._finish()
        self._bars.stop()

    def stage(self, name: str, total: int | None = None) -> None:
        """The stage before is over."""
        self._finish()
        self._task = self._bars.add_task(name, total=total)

    def tick(self) -> None:
        if self._task is not None:
            self._bars.advance(self._task)

    def _finish(self) -> None:
        if self._task is not None:
            self._bars.update(self._task, total=1, completed=1)


@dataclass(frozen=True)
class Outcome:
    """Both runs of one task; ``kind`` is the cache that the flat run used, ``unpadded_ms`` its step if nothing were padded."""

    model: Any
    tokenizer: Any
    task: Task
    cascade: Result
    flat: Result
    kind: str
    unpadded_ms: float

    def token_bytes(self) -> int:
        """Bytes of one token's keys and values in all layers."""
        config = self.model.config
        return 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim * self.model.dtype.itemsize

    def tokens_read(self) -> tuple[int, int]:
        """Tokens whose keys and values the last decode step attends to: (flat, cascade). Padding is not counted."""
        P, B = self.task.prompt.shape[1], len(self.task.private)
        private = sum(self.task.lens) + B * len(self.cascade.seconds)
        return B * P + private, P + private


def fail(message: str) -> None:
    """An error for people, on stderr."""
    Console(stderr=True).print(f"[red]{message}[/red]", soft_wrap=True, highlight=False)


def show(outcome: Outcome) -> None:
    """Answers, verdict, and the table of costs."""
    console = Console()
    console.print(_answers(outcome))
    for line in verdict(outcome):
        console.print(line, highlight=False)
    console.print(_costs(outcome))
    console.print(_explanation(outcome), highlight=False)


def _answers(outcome: Outcome) -> Table:
    table = Table("question", "answer (cascade)", title=_title(outcome), title_justify="left", show_lines=True)
    for question, tokens in zip(outcome.task.questions, outcome.cascade.tokens, strict=True):
        table.add_row(question, outcome.tokenizer.decode(tokens, skip_special_tokens=True).strip())
    return table


def _title(outcome: Outcome) -> str:
    task, model = outcome.task, outcome.model
    where = f"{str(model.dtype).removeprefix('torch.')} on {model.device.type}"
    return (
        f"{len(task.private)} requests share a prompt of {task.prompt.shape[1]} tokens "
        f"and add {min(task.lens)} to {max(task.lens)} of their own; {where}"
    )


def verdict(outcome: Outcome) -> list[str]:
    """Whether the tokens are equal and, where they are not, from where on and how close a call it was."""
    ours, plain = outcome.cascade.tokens, outcome.flat.tokens
    total = sum(map(len, plain))
    if ours == plain:
        closest = min(min(gaps) for gaps in outcome.flat.gaps)
        return [
            f"[green]All {total} tokens equal those of plain attention.[/green]",
            f"Closest call: the two best logits of a token were {closest:.2g} apart.",
        ]
    same = sum(a == b for x, y in zip(ours, plain, strict=True) for a, b in zip(x, y, strict=False))
    answers = sum(x == y for x, y in zip(ours, plain, strict=True))
    lines = [f"[yellow]{same} of {total} tokens ({same / total:.1%}), {answers} of {len(plain)} answers equal.[/yellow]"]
    for b, (x, y) in enumerate(zip(ours, plain, strict=True)):
        if x != y:
            at = next((i for i, (a, c) in enumerate(zip(x, y, strict=False)) if a != c), min(len(x), len(y)))
            gap = outcome.flat.gaps[b][min(at, len(y) - 1)]
            lines.append(
                f"  request {b} differs from token {at} on; there, plain attention's two best logits are {gap:.2g} apart"
            )
    return lines


def _costs(outcome: Outcome) -> Table:
    flat, cascade = outcome.flat, outcome.cascade
    read_flat, read_cascade = (n * outcome.token_bytes() for n in outcome.tokens_read())
    table = Table("", f"flat (sdpa, {outcome.kind})", "cascade", "ratio")
    for column in table.columns[1:]:
        column.justify = "right"
    for name, a, b, unit in (
        ("KV bytes read per decode step", read_flat / 1e6, read_cascade / 1e6, "MB"),
        ("KV memory held", flat.held / 1e6, cascade.held / 1e6, "MB"),
        ("time per decode step (median)", flat.ms_per_step, cascade.ms_per_step, "ms"),
    ):
        table.add_row(name, f"{a:,.1f} {unit}", f"{b:,.1f} {unit}", f"{a / b:.1f}x")
    return table


def _explanation(outcome: Outcome) -> str:
    B, P = len(outcome.task.private), outcome.task.prompt.shape[1]
    own = outcome.tokens_read()[1] - P
    text = (
        f"Bytes read, from shapes at the last step: {outcome.token_bytes():,} per token (K and V, all layers); flat reads "
        f"{B} x {P} prompt + {own} private tokens, cascade {P} + {own}. Copies that either makes on the way are not counted. "
        f"Flat's time has such copies in it: with a padding mask, transformers repeats K and V for every query head; "
        f"were all questions equally long, it would need no mask and {outcome.unpadded_ms:,.1f} ms per step."
    )
    if outcome.model.device.type == "cuda":
        text += " On a GPU a step of so small a model is bound by launches from Python, not by what attention reads."
    return text
