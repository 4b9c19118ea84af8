# SPDX-License-Identifier: Apache-2.0
"""Device memory that the ranks of one host map from each other, so that kernels read their peers' operands in place.

    device_access  allocate, zero, read and write device memory, in no caller's stream
    host_words     words that host and kernels both read and write: the abort, the first error
    ipc            memory shared by CUDA IPC handles
    symmetric      memory shared by torch's symmetric memory
    sharing        what the two have in common
    retirement     the end of what peers may have mapped
    meeting        rounds of the ranks of a block, through the group's store
    registration   memory that was there before, by whichever functions it was made
    virtual        the driver's virtual memory functions, and descriptors from process to process
    regions        what of this rank's memory its peers have mapped
    memory         one rank's end of all of it
    connect        how it is made, or refused by all ranks alike

Knows no plans and no calls.
"""
