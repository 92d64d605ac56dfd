"""What a run will take, before it is queued.

Memory comes from tracing the model on tensors without numbers (`trace`) under the engine's own storage policy
(`memory`), bytes between ranks from the server's own tiles (`plan`), seconds from a rehearsed round (`rehearsal`).
"""
