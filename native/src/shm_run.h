// SPDX-License-Identifier: Apache-2.0
// What the C entry points call, one function for each of them.
#pragma once

#include "shm_group.h"

namespace detcomm::shm {

dc_shm_status run_collective(dc_shm_group& group, const dc_shm_call& call, const void* input, void* output,
                             double factor);

dc_shm_status run_exchange(dc_shm_group& group, const dc_shm_parcel* sends, int num_sends,
                           const dc_shm_parcel* recvs, int num_recvs);

}  // namespace detcomm::shm
