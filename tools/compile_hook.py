"""The hook of hatchling that makes a wheel a compiled one (`make wheel`)."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class CompiledModules(BuildHookInterface[Any]):
    PLUGIN_NAME = "custom"

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Adds the libraries to a wheel; an editable installation runs its sources."""
        if version == "editable":
            return
        made = Path(self.root) / "build" / "libraries"
        shutil.rmtree(made, ignore_errors=True)
        tool = Path(self.root) / "tools" / "compile_modules.py"
        subprocess.run([sys.executable, str(tool), str(made)], check=True)
        build_data["pure_python"] = False
        build_data["infer_tag"] = True
        build_data["force_include"].update(
            {str(path): str(path.relative_to(made)) for path in sorted(made.rglob("*.so"))}
        )
