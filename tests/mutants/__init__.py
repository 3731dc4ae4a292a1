"""bnfold with one rule broken on purpose, many times over: the suite must notice every one."""
