"""Check types: pyright, basic mode. Modules in `untyped.txt` may have errors; it can only shrink.

Fails for an error in any other module, and for a module on the list that has none any more.
`--write` lists anew.
"""

import json
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
UNTYPED = ROOT / ".ci" / "untyped.txt"

command = [
    str(Path(sys.executable).parent / "pyright"),
    "--outputjson",
    "--pythonpath",
    sys.executable,
]
checked = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
if not checked.stdout.startswith("{"):
    sys.exit(checked.stdout + checked.stderr)
errors = defaultdict(list)
for each in json.loads(checked.stdout)["generalDiagnostics"]:
    if each["severity"] == "error":
        path = Path(each["file"]).relative_to(ROOT).as_posix()
        errors[path].append(
            f"{path}:{each['range']['start']['line'] + 1}: {each['message']} ({each.get('rule')})"
        )
if "--write" in sys.argv:
    UNTYPED.write_text("".join(f"{path}\n" for path in sorted(errors)))
excused = set(UNTYPED.read_text().split())
faults = [line for path in sorted(errors.keys() - excused) for line in errors[path]]
faults += [
    f"{path}: has no type errors, take it off .ci/untyped.txt"
    for path in sorted(excused - errors.keys())
]
print(*faults, f"types: {len(faults)} faults, {len(excused)} modules are excused", sep="\n")
sys.exit(bool(faults))
