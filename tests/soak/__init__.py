"""A soak: a long run of a world of constant size with faults, at whose end nothing may have grown.

`soak_world` has the accounts, which act at a constant rate; as many are deleted as are created. `soak_faults` draws
faults, which are those of the simulation. `resource_use` samples memory, files, tasks, connections and sizes.
`growth_check` fits a slope to each of them, and compares it with its limit. `soak_run` runs all of this, and compares
the database with the world at the end.
"""
