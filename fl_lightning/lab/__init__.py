"""Many runs: studies, comparisons, verdicts, audits, reports, plans and checks of methods."""
