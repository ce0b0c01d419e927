"""Site-wide settings of the ranks; ipyparallel reads this file from PREFIX/etc/ipython.

The values come from PREFIX/etc/ddl-labs/site.toml, section [engines]: change them there.
`cluster.start` takes them from `c.DDLLabs`; its arguments go first.
"""

import sys
import tomllib
from pathlib import Path

c = get_config()  # noqa: F821 - ipyparallel defines it

settings = tomllib.loads((Path(sys.prefix) / "etc/ddl-labs/site.toml").read_text())["engines"]
for name, value in settings.items():
    setattr(c.DDLLabs, name, value)

# For `ipp.Cluster()` and JupyterLab's panel "IPython Parallel": engines that are MPI ranks.
c.Cluster.engine_launcher_class = "mpi"
