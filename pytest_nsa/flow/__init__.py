"""Find the statement at which the ranks of a second run parted, from their recorded control flow. Imports neither torch nor nsa.

- `read`: a rank's log as frames, lines, values and calls
- `source`: the statements of a file, and where control meets again behind each
- `align`: two ranks' frames, statement by statement, to the first difference that changes their calls
- `reasons`: the values by which a statement decided, and the lines that set them
- `first`: the pairs of ranks that are compared, and the first divergence of all
"""
