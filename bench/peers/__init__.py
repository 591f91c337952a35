"""What other libraries do with the same bytes. One module each; none is imported before its section runs.

Their libraries are imported only in the processes that use them; where one is missing, `Missing` says what to install.
"""
