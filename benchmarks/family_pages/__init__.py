"""The pages of docs/families/, from facts, ready configs and rehearsals."""
