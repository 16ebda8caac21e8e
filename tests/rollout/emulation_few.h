extern "C" const char* emulate(const Step* step, u32 seed) {
  void* arguments[] = {(void*)step};
  auto run = [](void** from) { emulated::call(decode_few, from); };
  return emulated::launch({{run, arguments, GRID, THREADS + 128, 1, SHARED_MEMORY}}, GRID, seed);
}
