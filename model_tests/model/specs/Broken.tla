---- MODULE Broken ----
VARIABLE x
Init == x = 0 /\ y = 1
Next == x' = 
====
