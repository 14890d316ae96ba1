----------------------------- MODULE MCLitmus -----------------------------
EXTENDS Litmus

\* CONSTRAINT for `make fence-table`: prints what every row came to.
Report == Over => PrintT(<<"verdict", row, RelaxedOutcome>>)
=============================================================================
