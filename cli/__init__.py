"""The bnfold command line."""
