struct Link {  // as decoding_case.py makes it of chain.Link
  const char* name;
  void** arguments;
  int blocks, threads, shared_memory;
};
struct Known {
  const char* name;
  void (*run)(void**);
  int cluster;
};
#define KNOWN(KERNEL, CLUSTER) {#KERNEL, [](void** from) { emulated::call(KERNEL, from); }, CLUSTER}
const Known all[] = {  // with the blocks of a cluster, which __cluster_dims__ says to another compiler
    KNOWN(chain_begin, 1), KNOWN(product_qkv, SPLIT_QKV), KNOWN(product_out, SPLIT_OUT), KNOWN(product_up, SPLIT_UP),
    KNOWN(product_down, SPLIT_DOWN), KNOWN(attend_1, 1), KNOWN(attend_2, 2), KNOWN(attend_4, 4), KNOWN(attend_8, 8),
    KNOWN(attend_16, 16), KNOWN(attend_crowd, 1)};

extern "C" const char* emulate(const Link* links, int count, u32 seed) {
  constexpr int ROOM = 24;  // blocks
  std::vector<emulated::Kernel> kernels;
  for (const Link* link = links; link < links + count; ++link)
    for (const Known& known : all)
      if (!strcmp(known.name, link->name))
        kernels.push_back({known.run, link->arguments, link->blocks, link->threads, known.cluster, link->shared_memory});
  if ((int)kernels.size() < count) return "there is no such kernel";
  return emulated::launch(kernels, ROOM, seed);
}
