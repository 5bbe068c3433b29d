"""The report: one page of HTML about many runs, which needs no network and no other file.

`experiments` says which runs belong together, `charts` what is drawn of them, `material` finds what else lies
in the folder of the runs, `divergences` compares runs that should be equal, and `page` writes it all down.
"""
