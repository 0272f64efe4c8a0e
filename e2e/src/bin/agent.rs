//! What runs in the pods of the cluster suite: `sallyport-e2e-agent upstream|agent|once ...`.

fn main() -> anyhow::Result<()> {
    sallyport_e2e::agent::main(std::env::args().skip(1))
}
