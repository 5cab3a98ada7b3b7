#!/usr/bin/env bash
# Fills .whl/ with the packages that rondo or its tests need and a machine with a GPU may lack, for Python 3.12 on
# Linux x86-64, in the versions of constraints/cpu.txt. run.sh installs them there without an index. Needs pip and an
# index here. What is not in the list is taken to be there: torch, transformers, and what the two bring; numpy, pyarrow,
# pyyaml, rich, safetensors, jinja2, matplotlib; pytest with its timeouts.
set -euo pipefail
cd "$(dirname "$0")/../.."
PYTHON=${PYTHON:-python3}
rm -rf .whl
platforms=(manylinux_2_28_x86_64 manylinux_2_27_x86_64 manylinux_2_17_x86_64 manylinux2014_x86_64 manylinux1_x86_64)
"$PYTHON" -m pip download --quiet --no-deps --only-binary=:all: --python-version 3.12 --implementation cp \
  "${platforms[@]/#/--platform=}" --constraint constraints/cpu.txt --dest .whl \
  annotated-types cloudpickle pydantic pydantic-core typing-inspection
du -ch .whl/*.whl
