"""What a GPU is asked on the day it is there: one command, each question in a process of its own.

``__main__`` is the command, ``plan`` the steps and their order, ``runner`` runs them, ``document``
keeps what they found, ``whole_file`` writes it. These import nothing but the standard library,
since one of the steps builds kvburst. ``step`` is what runs a measurement (``copy_cost``,
``bandwidth``, ``caller``, ``overlap``, ``staging``), ``ask`` a probe (``probes_*``), which needs no
kvburst either.
"""
