import importlib.util
import sys

_missing = [
    name for name in ("optax", "orbax", "matplotlib") if importlib.util.find_spec(name) is None
]
if _missing:  # before a module here imports one of them: a line instead of a traceback
    sys.exit(f"error: {', '.join(_missing)} not installed: pip install -e '.[train]'")
