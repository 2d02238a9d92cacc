"""The catalogue of bad inputs: what each one prints. A case is a row: its name, how it is
broken, the message.
"""
