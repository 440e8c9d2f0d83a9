"""Plugins that run a suite's tests on ranks without a change of its tests: `-p pytest_nsa.adapters.NAME`.

| name | for tests that |
| --- | --- |
| `spawn` | call `torch.multiprocessing.spawn` or `start_processes` |
| `elastic` | call torch's `elastic_launch` |
| `multiprocess_test_case` | are methods of torch's `MultiProcessTestCase`, or of a copy of it |
| `deepspeed`, `streaming` | are methods of these projects' `DistributedTest` |
| `monai` | have MONAI's decorator `DistCall` |
"""
