"""NSA on a GPU: one file per kernel family; `branches`, `block_schedule` and `selection_schedule` launch them; `support`
decides, without importing Triton, whether they can serve.

Read `rows` first (what a program's rows are), then `strided`, `importance`, `pick_blocks`, `lists`,
`selection_forward`, `gates`; then `whole`. docs/kernels.md draws what a program of each reads and writes.
"""
