"""The tests. They mirror `src/antiphon` file by file; `test_mirror.py` says where and why not."""
