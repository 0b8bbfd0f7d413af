"""The window of a round: the anchor's row and the drafted nodes' rows, as one small array.

Row 0 is the anchor; row i + 1 is node i. `paths[r, j]` is the row of r's ancestor at depth j (r
itself at its own depth), which is all that verification needs: whom a row sees, where it stands,
whom it must agree with, and which rows are committed.

    anchor ─ a ─ c        rows    0: anchor  1: a  2: b  3: c
           └ b            depths  0          1     1     2
                          paths  [0]   [0 1]   [0 2]  [0 1 3]
"""

from __future__ import annotations

import numpy as np

from dflash_jax.tree.growth import CAP, NO_PARENT, DraftTree

MAX_ROWS = CAP + 1
# Columns of a window array.
TOKEN, DEPTH, PATH = 0, 1, 2
WINDOW_COLUMNS = PATH + MAX_ROWS


def window_array(tree: DraftTree, width: int, rows: int) -> np.ndarray:
    """The window of the first `width` nodes, padded to `rows` rows.

    Args:
      tree: a draft tree of at least `width` nodes.
      width: nodes to verify.
      rows: rows of the compiled function, at least width + 1. Rows beyond the window are copies of
        the anchor's that nothing reads.

    Returns:
      int32 [rows, WINDOW_COLUMNS]: token (the device knows the anchor's), depth, path.
    """
    window = np.zeros((rows, WINDOW_COLUMNS), np.int32)
    window[1 : width + 1, TOKEN] = tree.tokens[:width]
    window[1 : width + 1, DEPTH] = tree.depths[:width]
    for node in range(width):
        parent_row = tree.parents[node] + 1 if tree.parents[node] != NO_PARENT else 0
        row, depth = node + 1, tree.depths[node]
        window[row, PATH:] = window[parent_row, PATH:]
        window[row, PATH + depth] = row
    return window
