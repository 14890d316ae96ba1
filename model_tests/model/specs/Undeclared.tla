---- MODULE Undeclared ----
VARIABLE x
Init == x = 0 /\ y = 1
Next == x' = x
====
