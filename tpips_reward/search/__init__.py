"""Images by aspect: a folder embedded once (late fusion), and nearest neighbours in chosen aspects (extra `search`).

Nothing is imported here, so that the command line stays quick.
"""
