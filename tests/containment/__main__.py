"""``python -m tests.containment``: run the whole matrix, and print the table of docs/security.md."""

import sys
from concurrent.futures import ThreadPoolExecutor

from .matrix import ENDS, SHAPES, Row, Setting, run, table

SETTINGS = {
    "none": [Setting("fork", "none"), Setting("spawn", "none")],
    "namespace": [Setting("fork", "namespace"), Setting("spawn", "namespace")],
}


def main() -> None:
    outcomes: dict[tuple[str, str], list[Row]] = {}
    with ThreadPoolExecutor(2) as pool:
        for level, settings in SETTINGS.items():
            for end in ENDS:
                work = [(setting, end, shape) for setting in settings for shape in SHAPES]
                rows = outcomes[level, end] = list(pool.map(lambda each: run(*each), work))
                worst = max(row.ms for row in rows)
                left = sum(len(row.left) for row in rows)
                trees = sum(row.marked for row in rows)
                print(
                    f"{level:10} {end:24} {trees} processes, {left} left, the last after {worst} ms",
                    flush=True,
                )
    print(table({key: [row.left for row in rows] for key, rows in outcomes.items()}))
    sys.exit(any(row.left for rows in outcomes.values() for row in rows))


main()
