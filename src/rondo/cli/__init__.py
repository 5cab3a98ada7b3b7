"""The command line: `rondo train`, `sft`, `eval`, … (see main.py). The only place that prints."""
