//! The faulty filter as a process of its own, so that it can be killed and stopped:
//! `sallyport-fault-extproc --socket PATH`.
#![allow(clippy::panic, reason = "test equipment")]

fn main() -> anyhow::Result<()> {
    let mut args = std::env::args().skip(1);
    // The rig passes both filters the same arguments; this one has no use for a policy.
    while let Some(arg) = args.next() {
        if arg == "--socket" {
            let socket = args.next().ok_or_else(|| anyhow::anyhow!("--socket needs a path"))?;
            return sallyport_e2e::fault_extproc::serve(socket.as_ref());
        }
    }
    anyhow::bail!("usage: sallyport-fault-extproc --socket PATH")
}
