"""The report: one page of HTML about many runs, which needs no network and no other file."""
