r"""Replays width rules over synthetic or recorded traces, against the best fixed width.

    python scripts/replay.py --config=configs/replay/thread.py --out=docs/receipts/replay/thread
    python scripts/replay.py --config=configs/replay/thread.py --traces=rounds.jsonl --out=runs/mine

Writes OUT.jsonl (a line a cell), OUT.md and OUT.png. Cells that OUT.jsonl already has are not run
again, so an interrupted run goes on where it stopped; --fresh starts over. The picture needs
`pip install -e '.[train]'`.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import rich.console
import rich.progress
import rich.table
from absl import flags
from ml_collections import config_flags

from dflash_jax import entry
from dflash_jax.bench.replay_grid import Grid, measure
from dflash_jax.bench.replay_plots import draw
from dflash_jax.bench.replay_report import markdown, verdicts
from dflash_jax.errors import InputError

_CONFIG = entry.config_flag("configs/replay/thread.py", "The cells.")
_OUT = flags.DEFINE_string("out", None, "Where to write, without the ending.", required=True)
_TRACES = flags.DEFINE_list("traces", [], "Files of decode.py --width=15 --trace_out.")
_FRESH = flags.DEFINE_bool("fresh", False, "Run every cell, whatever OUT.jsonl has.")
_SIZE = ("streams", "rounds", "seed")


def read_records(path: Path, fresh: bool) -> dict[str, dict[str, Any]]:
    """The cells already run, by name. Raises `InputError` if the file is not a replay's."""
    if fresh or not path.exists():
        return {}
    try:
        records = [json.loads(line) for line in path.read_text().splitlines()]
        return {record["cell"]: record for record in records if record.keys() >= {*_SIZE, "rules"}}
    except (AttributeError, ValueError, KeyError, TypeError) as error:
        raise InputError(f"{path}: not a replay record ({error!r}); use --fresh") from error


def same(record: dict[str, Any], grid: Grid, rounds: int) -> bool:
    """Whether a record on file is what this config would give."""
    size = tuple(record[name] for name in _SIZE)
    rules = {*grid.rules, "oracle"}
    return size == (grid.streams, rounds, grid.seed) and set(record["rules"]) == rules


def to_line(record: dict[str, Any]) -> str:
    return json.dumps(record, separators=(",", ":")) + "\n"


def run(grid: Grid, out: Path, command: str, fresh: bool) -> list[dict[str, Any]]:
    """Runs the cells that are missing, then writes the table and the picture."""
    path, table, picture = (out.with_name(out.name + end) for end in (".jsonl", ".md", ".png"))
    for file_path in (path, table, picture):
        if file_path.is_dir():
            raise InputError(f"--out={out}: {file_path} is a folder")
    out.parent.mkdir(parents=True, exist_ok=True)
    done = read_records(path, fresh)
    cells = grid.cells()
    console = rich.console.Console(stderr=True)
    with path.open("w" if fresh else "a") as file:
        for cell in rich.progress.track(cells, "cells", console=console):
            if cell.name not in done or not same(done[cell.name], grid, cell.rounds):
                done[cell.name] = measure(cell, grid.rules)
                file.write(to_line(done[cell.name]))
                file.flush()
    records = [done[cell.name] for cell in cells]
    path.write_text("".join(map(to_line, records)))  # in order, and without other configs' cells
    table.write_text(markdown(records, command, f"Replay: {out.name}"))
    draw(records, picture)
    return records


def main(argv: list[str]) -> None:
    del argv
    config = dict(_CONFIG.value)
    filename = config_flags.get_config_filename(flags.FLAGS["config"])
    command = f"python scripts/replay.py --config={filename}"
    if _TRACES.value:
        config["traces"] = tuple(_TRACES.value)
        command += f" --traces={','.join(_TRACES.value)}"
    command += f" --out={_OUT.value}"
    try:
        records = run(Grid.from_config(config), Path(_OUT.value), command, _FRESH.value)
    except OSError as error:
        raise InputError(
            f"--out={_OUT.value}: {error.strerror}; cells that ran are kept"
        ) from error
    table = rich.table.Table("bar (renewal)", "cells", "met", "worst")
    for v in verdicts(records):
        table.add_row(v.bar, str(v.cells), str(v.cells - len(v.unmet)), f"{v.worst:.4f}")
    rich.console.Console().print(table)


if __name__ == "__main__":
    entry.run(main)
