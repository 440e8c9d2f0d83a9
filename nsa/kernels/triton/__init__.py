"""NSA on a GPU: one file a kernel family, `calls` launches them, `support` says whether they can serve (no import of Triton).

Read `rows` first (what a program's rows are), then `strided`, `importance`, `select`, `lists`, `selected`, `gates`; then `whole`.
docs/kernels.md draws what a program of each reads and writes.
"""
