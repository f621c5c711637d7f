"""Random worlds with faults, indexed by a daemon whose database is compared with an oracle.

`draw_schedule` draws a schedule (`fault_schedule`: pure data) from a seed, and `draw_status_changes` adds an account to
it. `simulated_world` and `fault_injection` carry it out with servers on loopback and a daemon. `world_oracle` derives
the truth from the schedule alone. `simulation_run` runs the world, and `world_checks` compares the database with the
truth, again and again while the daemon runs and at the end. How to add a fault: see `fault_injection`.
"""
