"""The site of the course: what Sphinx and MyST-NB do not bring themselves.

`build` lays the pages of the repository out as one tree and runs Sphinx; the other modules are
extensions that `conf.py` names, one for each thing that is made from the course's own files.
"""
