"""The git record of a run: a commit of the work tree, without touching branch, index or files."""
