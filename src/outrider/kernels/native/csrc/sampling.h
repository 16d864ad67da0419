// From logits to a drawn token: what sampling.cpp, filters.cpp and race.cpp offer other native code.
#pragma once

#include <cstdint>

#include "team.h"

extern "C" {

void outrider_argmax(outrider::Team*, const float* logits, int64_t* out, int num_rows,
                     int64_t size);
void outrider_softmax(outrider::Team*, const float* logits, float temperature, float* out,
                      int num_rows, int64_t size);
void outrider_masses(outrider::Team*, const float* logits, float temperature, const int32_t* tokens,
                     double* out, int num_rows, int64_t size);
void outrider_top_k(outrider::Team*, const float* logits, int64_t k, float* out, int num_rows,
                    int64_t size);
void outrider_keep_likely(outrider::Team*, float* distributions, double top_p, double min_p,
                          int num_rows, int64_t size);
int64_t outrider_race(outrider::Team*, const float* weights, uint64_t seed, uint32_t position,
                      uint32_t sample, int64_t size);
int64_t outrider_pick(outrider::Team*, const float* weights, double uniform, int64_t size);
double outrider_leftover(outrider::Team*, const float* p, const float* q, int64_t token,
                         double share, float* out, int64_t size);
}
