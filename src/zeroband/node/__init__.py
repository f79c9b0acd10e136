"""Inside one machine: the mesh of local ranks, copies, shared memory, child processes and fault points."""
