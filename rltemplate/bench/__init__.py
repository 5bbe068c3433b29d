"""Speed, measured side by side with others on one machine: `make bench`.

`works` says what is done and what has to be the same for all who do it, `contenders` builds them, `measure`
runs one of them in the process that it is called in, `plan` lists what is to be measured, `session` starts a
process for each and keeps what it gave, `tables` and `plots` show it, and `goals` what it was to be.
"""
