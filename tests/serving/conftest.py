import sys
from pathlib import Path

# `served` is what the tests of this folder share; pytest's importlib mode adds no folder itself.
sys.path.insert(0, str(Path(__file__).parent))
