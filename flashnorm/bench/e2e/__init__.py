"""`flashnorm bench e2e`: whole models against the ways in which they are usually run, in one run."""
