"""Both ends of a transfer: one program that the host imports and sends to the pod, too.

Standard library only, because the pod's end runs under a bare `python3 -I -S`. Both ends are always
of one version, whatever image the sandbox runs. Either end may be hostile to the other: a pod can run
anything, so the host believes nothing that it has not checked itself.

    sender                                receiver
    E… e   what there is                  checks every name, makes folders
           …                      W… w    which files, and how much of each is there already, with its sum
    B D… F each file: begin, data, sum    writes beside the target, reads back, compares, renames
    d                                     links, removals, folders' times
                                  R… r    what became of each file
"""
