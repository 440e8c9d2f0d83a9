"""Record a rank's control flow: lines, calls, values. Imports no torch.

- `log`: the mapped file of events, and its format
- `statements`: the names that each line of a source file sets, and those by which it decides
- `values`: a value as a short text
- `recorder`: what runs at each line, by `sys.monitoring` or `sys.settrace`
"""
