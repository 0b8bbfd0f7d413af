"""One legend of shape letters, used in every docstring and shape comment.

B  batch
T  rows of a window or block (tokens computed together)
S  cache capacity or context length, in tokens
N  query heads
K  key/value heads (of attention); candidates per position (of a lattice)
H  head dimension
D  hidden size (of a model); drafted positions (of a lattice)
V  vocabulary size
W  width: drafted nodes verified in a round
L  layers
"""
