"""What is kept of clients and server between rounds: `state`, decided in `policy`; where it lies:
`store`."""
