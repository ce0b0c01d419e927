"""The site of the course: what we add to Sphinx and MyST-NB.

`build` copies the pages of the repository into one folder and runs Sphinx on it. `extension` lists
the modules that extend Sphinx: each of them makes one part of the site from the course's files.
"""
