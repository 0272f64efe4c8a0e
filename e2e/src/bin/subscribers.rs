//! Many subscribers of the operator's discovery.

fn main() -> anyhow::Result<()> {
    let args: Vec<_> = std::env::args().skip(1).collect();
    sallyport_e2e::subscribers::main(&args)
}
