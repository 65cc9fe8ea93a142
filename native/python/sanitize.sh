#!/usr/bin/env bash
# The tests of BatchQueue with its compiled part built for the address and undefined sanitizers.
set -euo pipefail
cd "$(dirname "$0")/../.."
python=.venv/bin/python
folder=$PWD/build/express-sanitized
mkdir -p "$folder"

include=$("$python" -c 'import sysconfig; print(sysconfig.get_path("include"))')
g++ -std=c++20 -O1 -g -fPIC -shared -fno-rtti -fno-omit-frame-pointer \
  -fsanitize=address,undefined -fno-sanitize-recover=all -DPy_LIMITED_API=0x030B0000 \
  "-I$include" native/python/express.cpp -o "$folder/_express.abi3.so"

# Before the finder of an editable install, whose .pth file comes earlier.
cat >"$folder/sitecustomize.py" <<'END'
import sys
from importlib.abc import MetaPathFinder
from importlib.util import spec_from_file_location
from pathlib import Path


class Finder(MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name == "orchard.serving._express":
            return spec_from_file_location(name, Path(__file__).with_name("_express.abi3.so"))
        return None


sys.meta_path.insert(0, Finder())
END

# torch and Python leave memory to the end of the process, so leaks are not looked for here.
export PYTHONPATH=$folder PYTHONMALLOC=malloc ASAN_OPTIONS=detect_leaks=0:allocator_may_return_null=1
LD_PRELOAD="$(g++ -print-file-name=libasan.so) $(g++ -print-file-name=libstdc++.so)"
export LD_PRELOAD
"$python" -c 'import orchard.serving._express as it; assert "sanitized" in it.__file__, it'
"$python" -m pytest -q --capture=sys -p no:cacheprovider tests/serving/test_{express,waves,batch_queue}.py
